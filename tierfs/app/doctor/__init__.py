"""What `tierfs doctor` looks at, one file per subject: ``look()`` gives facts, ``judge(facts)`` gives findings."""
