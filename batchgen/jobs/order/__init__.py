"""The rows of a job as requests, in the order in which they run."""
