"""Run best-effort jobs: a shim that starts, holds and ends a job's processes, and what runs Python jobs in steps."""
