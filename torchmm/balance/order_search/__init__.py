"""torchmm/balance/order_search."""
