"""Weight images, and the memory into which they are fetched and from which they are evicted."""
