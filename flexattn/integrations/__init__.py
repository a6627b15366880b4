"""One file per ecosystem, each imported only by who needs it. Other libraries' spellings are converted here and nowhere else."""
