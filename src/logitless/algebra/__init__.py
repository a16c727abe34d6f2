"""Array-agnostic maths of the vocabulary pass: online softmax, the statistics, the costs. Standard library only."""
