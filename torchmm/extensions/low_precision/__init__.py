"""Float8 matrix products, and optimizer states of 16 and 8 bits or in host memory."""
