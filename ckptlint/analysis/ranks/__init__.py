"""Contents of the ranks of the job that saved."""
