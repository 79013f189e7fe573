"""What must outlive the processes, in SQL: tenants and their keys."""
