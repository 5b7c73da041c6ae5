"""`cotenant serve`: a repository, planned and served until somebody says stop."""

from __future__ import annotations

import asyncio

import msgspec

from cotenant.cli.interrupt import interruptible
from cotenant.cli.plan import split_table, tell_guesses
from cotenant.cli.prepare import Preparation, backend_of
from cotenant.cli.serving import Addresses, serving
from cotenant.cli.show import console, profile_progress, show_json, tell
from cotenant.config import Settings
from cotenant.live.site import Site
from cotenant.measure.draw import plan_bars, plan_table
from cotenant.planners.applications import plain


async def run(settings: Settings, *, json: bool) -> None:
    """json: print the addresses and the plan as JSON, once the server is up, instead of a table."""
    backend = backend_of(settings)
    async with interruptible():
        with profile_progress() as progress:
            preparation = Preparation(settings, backend, progress)
            site = await preparation.site()
        async with serving(settings, backend, preparation, site) as (_, addresses):
            if json:
                # In one line: whoever started us reads it, and knows that it has all.
                up = msgspec.json.encode({"addresses": addresses, "plan": msgspec.Raw(site.plan.to_json())})
                show_json(msgspec.json.format(up, indent=-1))
            else:
                show_site(site, backend.holds())
                show_addresses(addresses)
            await asyncio.Event().wait()


def show_site(site: Site, holds: str) -> None:
    console.print(plan_table(site.plan, plain(site.problem, site.plan.split).models))
    console.print(plan_bars(site.plan))
    if site.plan.split:
        console.print("", split_table(site.plan, site.problem), "", sep="\n")
    console.print(f"shares are held by {holds}", highlight=False)
    for name, reason in site.broken.items():
        tell("not served", f"{name}: {reason}")
    tell_guesses(site.plan, site.problem)


def show_addresses(addresses: Addresses) -> None:
    console.print(
        f"serving HTTP at http://{addresses.http}, gRPC at {addresses.grpc}, metrics at http://{addresses.metrics}"
        "/metrics; Ctrl-C stops",
        highlight=False,
        soft_wrap=True,
    )
