"""Plans on demand, validated by simulation, and the studies that need many: fleet sizes and what-if scenarios."""
