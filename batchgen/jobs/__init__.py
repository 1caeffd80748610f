"""What survives a crash: a job's folder, its results, and what makes two runs one job. No torch, no prompts."""
