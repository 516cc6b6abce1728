"""Text generation token by token with a cache, in every layout."""
