"""Float8 matmuls, 4-bit frozen weights, and optimizer states in 16 or 8 bits or in host memory."""
