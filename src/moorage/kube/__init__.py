"""What every component uses to talk to Kubernetes: objects, client, informer, queue, election, events.

Start reading at: `api.client.Client`, `cache.informers.Informers`, `control.controller.Controller`.
"""
