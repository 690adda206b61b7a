"""What names mean whoever wrote them: tensor keys, mesh axes, configuration fields."""
