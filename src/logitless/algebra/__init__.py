"""Array-agnostic maths of the vocabulary pass: the fold, the statistics, the costs. Standard library only."""
