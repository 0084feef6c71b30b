"""A simulation shared out over several processes, the ranks of torch.distributed.

Rank 0 runs the experiment as one process does. The others do what it asks: train a share of the jobs, sum and test
the models that they hold, test models on a share of the rows. Between two rounds they keep nothing.
"""
