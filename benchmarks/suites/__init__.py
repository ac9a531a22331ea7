"""asv suites. Parameters are spelled out, so that a number means the same at every commit; what a commit or a
machine lacks is skipped in setup."""
