"""The operators' routes (/admin/...): engines, services, long-running operations, and access to them."""
