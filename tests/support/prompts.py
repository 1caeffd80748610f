"""Token lists of prompts whose prefix tree is known."""

# Nodes: [0, 2) of 6 saves 10; [2, 3) of 2 saves 1; [2, 6) of 3 saves 8; [6, 9) of 2 saves 3; [0, 5) of 2 saves 5.
NESTED = [
    [1, 1, 0, 1], [1, 1, 0, 2], [1, 1, 4, 4, 4, 4, 1, 1, 1, 0], [1, 1, 4, 4, 4, 4, 1, 1, 1, 1],
    [1, 1, 4, 4, 4, 4, 2], [1, 1, 7], [5, 5, 5, 5, 5], [5, 5, 5, 5, 5],
]  # fmt: skip
