"""Benchmarks of convpar: asv suites, the published ladder, results and the tables made from them. See README.md."""
