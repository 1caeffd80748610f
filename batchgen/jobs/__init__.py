"""Everything that survives a crash: a job's folder, its results, and the settings that make two runs one job. No torch, no prompts."""
