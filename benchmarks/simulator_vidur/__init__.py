"""Speed of Shoal's simulator compared with Vidur's."""
