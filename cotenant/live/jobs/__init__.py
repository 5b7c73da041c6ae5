"""Run best-effort jobs beside what is served: start and hold their processes, measure what serving leaves idle."""
