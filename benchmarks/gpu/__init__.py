"""The published GPU experiments, repeated: ``python -m benchmarks.gpu [ladder|blocks|widths|streams|calls|all]``.

Each experiment prints its times beside the figures of the report that it repeats (`published` reads them from
benchmarks/published.csv, `steps` says which rung and options stand for each of them), and with ``--json-dir
benchmarks/results/studies`` merges them into the result file of this GPU model.
"""
