"""Copies of the newest checkpoint on the nodes themselves, from which a restart on the same nodes goes on in seconds.

A copy is a checkpoint like those of the run directory: the same files, digests and manifest. But no folder is shared, so
each node holds the files of its own ranks and of the ranks of the node before it (`save`): one node may be lost, or its
copy damaged, and all files are still there. A copy is lost with the allocation; every other checkpoint is as without.

The steps of a copy, and why each is needed:
 1. Every rank writes its file into a folder of this incarnation on its node, and hands in name, size and digest. Rank 0
    checks that nothing is missing and that no newer incarnation has taken over, as for every checkpoint.
 2. Every rank sends its file to a rank of the next node, block by block (`transfer`), which compares each with its
    digest.
 3. When all have all of it, one rank of each node writes index, manifest, lineage and COMPLETE.
 4. When all have done that, each node renames its folder. The copy before it is removed when all nodes have.

So at any moment all files of the newest copy, or of the one before it, are on the nodes.

To restore (`restore`), the nodes tell each other what they hold, and choose the newest copy all of whose files are
somewhere; blocks that a node needs and does not hold are sent to it. Which copies may be taken at all is decided by
`lineage`: one from before a step back never is. `folder` is the folder of one node.

Nothing is imported here: `folder` and `lineage` need no torch.
"""
