"""What every process of batchgen needs before it has a model: few imports, few garbage collections, signals, the user's cache folder, the cores and the memory that it may use. No torch."""
