"""The command `batchgen`: parses, calls the package `batchgen`, prints. No logic of its own."""
