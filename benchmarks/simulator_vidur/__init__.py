"""Speed of Shoal's simulator beside Vidur's."""
