"""Projects with their limits, keys and sessions, the audit log, and usage."""
