"""Published runs of other frameworks: tables read, conventions, their stacks priced beside ours."""
