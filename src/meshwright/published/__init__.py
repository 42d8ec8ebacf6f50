"""Published runs of other frameworks: their tables read, their conventions, their stacks priced beside ours."""
