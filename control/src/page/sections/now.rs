//! `/`: what serves whom, on how many replicas, since when, why, and how to go back.

mod read;
mod view;

use axum::extract::State;
use edge::Problem;
use maud::html;
use time::OffsetDateTime;

use read::read;

use crate::page::layout::{Region, Shown, framed};
use crate::page::site::Site;
use crate::page::viewer::Viewer;
use crate::page::watched::Watched;

pub async fn regions(site: &Site) -> Result<Vec<Region>, Problem> {
    Ok(view::regions(&read(site).await?, OffsetDateTime::now_utc()))
}

pub async fn page(State(site): State<Site>, viewer: Viewer) -> Result<Shown, Problem> {
    let data = read(&site).await?;
    let regions = view::regions(&data, OffsetDateTime::now_utc());
    let lead = html! { "Which version each group of users gets, why, and how to go back." };
    let bottom = view::decide(&data, &viewer.audience);
    let parts = [lead, html! {}, bottom];
    Ok(framed(&site, &viewer, Watched::Now, "Now", "/", parts, &regions))
}
