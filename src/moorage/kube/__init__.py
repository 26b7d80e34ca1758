"""What every component uses to talk to Kubernetes: objects, client, informer, queue, election, events.

Start reading at: `client.Client`, `informer.Informers`, `queue.WorkQueue`.
"""
