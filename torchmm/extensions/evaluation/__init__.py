"""Generate text and images for held-out samples, and score them."""
