"""Several runs that answer one question: sweeps, the highest load that holds, and which of two servers is faster."""
