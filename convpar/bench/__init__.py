"""Times side by side: convpar's backends and other libraries on the cases of `convpar.cases`.

`libraries` says how each library is driven, `worker` is the process that it runs in,
`process` holds such a process from outside, `check` judges the answers, `measure` puts
the turns in order, and `results` keeps what was found.
"""
