//! `GET /live`: the regions of a page again and again, as server-sent events.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::HeaderName;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use edge::Problem;
use edge::query::Query;
use futures::StreamExt;

use crate::page::layout::Region;
use crate::page::sections;
use crate::page::site::Site;
use crate::page::viewer::{Audience, Viewer};
use crate::page::watched::{Asked, Watched};

/// Then the browser asks again, with its key: one that was revoked ends its streams within this time.
const STREAM_MAX: Duration = Duration::from_secs(20);

pub async fn stream(State(site): State<Site>, viewer: Viewer, Query(asked): Query<Asked>) -> Result<Response, Problem> {
    let watched = asked.watched()?;
    let place = site.live().enter(viewer.key)?;
    let audience = viewer.audience;
    let key = (watched, audience.clone());
    let shutdown = site.live().shutdown();
    let looked_at = site.clone();
    let receiver = site.live().follow(key, watched.every(), move || {
        let (site, audience) = (looked_at.clone(), audience.clone());
        async move {
            let regions = regions(watched, &site, &audience).await;
            regions.map_or_else(
                |problem| Err(problem.detail.unwrap_or_else(|| problem.title.into_owned()).into()),
                |regions| Ok(message(regions)),
            )
        }
    });
    let events = futures::stream::unfold((receiver, place), async |(mut receiver, place)| {
        loop {
            receiver.changed().await.ok()?;
            let latest = receiver.borrow_and_update().clone();
            let event = match latest {
                None => continue,
                Some(Ok(data)) => Event::default().data(&*data),
                Some(Err(why)) => Event::default().event("failed").data(&*why),
            };
            return Some((Ok::<_, Infallible>(event), (receiver, place)));
        }
    });
    let over = async move {
        tokio::select! {
            () = tokio::time::sleep(STREAM_MAX) => {}
            () = shutdown.cancelled() => {}
        }
    };
    let sse = Sse::new(Box::pin(events.take_until(Box::pin(over)))).keep_alive(KeepAlive::default());
    // proxies that gather answers would hold the events back
    Ok(([(HeaderName::from_static("x-accel-buffering"), "no")], sse).into_response())
}

fn message(regions: Vec<Region>) -> Arc<str> {
    let bodies: BTreeMap<&str, String> = regions
        .into_iter()
        .map(|region| (region.id, region.body.into_string()))
        .collect();
    // an object of texts; its lines hold no line breaks
    serde_json::to_string(&bodies).unwrap_or_default().into()
}

/// What a page shows now.
async fn regions(watched: Watched, site: &Site, audience: &Audience) -> Result<Vec<Region>, Problem> {
    match watched {
        Watched::Now => sections::now::regions(site).await,
        Watched::Releases => sections::releases::regions(site).await,
        Watched::Canary(id) => sections::releases::canary::regions(site, id).await,
        Watched::Learning(span) => sections::learning::regions(site, span).await,
        Watched::Runs => sections::runs::regions(site).await,
        Watched::Tide => sections::tide::regions(site).await,
        Watched::Fleet => sections::fleet::regions(site).await,
        Watched::Feedback(span) => sections::feedback::regions(site, audience, span).await,
        Watched::Ledger(span) => sections::ledger::regions(site, audience, span).await,
    }
}
