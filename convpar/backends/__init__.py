"""The backends: `reference` (the oracle), `cpu` and `gpu` (the ladders).

None of them imports another, nor anything above `convpar.backend`.
"""
