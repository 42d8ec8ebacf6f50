"""What a step consists of, apart from any machine: operators, FLOPs, number formats, layouts, schedules."""
