"""Pure policies: orders, admissions and victims, and what they may read of a service."""
