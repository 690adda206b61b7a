"""The command line: one module for each command.

`main`, `shared`, `completion` and the modules whose options the shell completes with rules (`check`, `explain`) import
what is heavy only where it is used; the others are imported when their command is, and import what they need.
"""
