"""Reads records and nothing else: statistics, attribution, figures and reports. Never imports torch or granikv."""
