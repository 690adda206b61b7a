"""What a user asks of a check: options and files of settings, which rules run, and which findings do not count."""
