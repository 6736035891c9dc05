"""Routes for models that give a row of numbers for a text: embeddings, scores of pairs, classes."""
