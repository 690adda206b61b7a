"""The folder of a run: its steps, which of them is finished, the files of each."""
