"""The page of a rule, with its cases as examples."""
