"""Scheduling policies as pure functions: orders, admissions, victims, and their view of services."""
