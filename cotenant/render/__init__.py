"""Presentation: tables for terminals (rich) and figures for files (matplotlib) of plans, profiles and runs."""
