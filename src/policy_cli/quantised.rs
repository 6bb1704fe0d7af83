//! Quantised copies of versions: made here, and checked against the manifest before anybody gets them.

use std::sync::Arc;

use anyhow::Context;
use policy::image::Image;
use policy::kernel::Threads;
use policy::manifest::Manifest;
use policy::quant::{self, Spec};

/// The copy of a version that was put together. `from` are an older copy and what that is of: then only what differs is quantised.
pub(super) async fn copy(
    manifest: &Manifest,
    image: Arc<Image>,
    spec: Spec,
    from: Option<(Arc<Image>, Arc<Image>)>,
) -> anyhow::Result<Image> {
    let manifest = manifest.clone();
    let version = manifest.version;
    let made = tokio::task::spawn_blocking(move || -> anyhow::Result<Image> {
        let from = from.as_ref().map(|(copy, of)| (&**copy, &**of));
        Ok(quant::verified(&image, &manifest, spec, from, &threads()?)?)
    });
    made.await?.with_context(|| format!("quantise version {version}"))
}

/// Makes every copy that the manifest names and that can be made here. Says what came of each.
pub(super) async fn check(manifest: &Manifest, image: &Arc<Image>) -> anyhow::Result<()> {
    let version = manifest.version;
    if manifest.quantised.is_empty() {
        println!("the manifest of version {version} names no quantised copies");
    }
    for named in &manifest.quantised {
        match named.spec.parse() {
            Ok(spec) => {
                copy(manifest, image.clone(), spec, None).await?;
                println!("its copy by {spec} has root {}, as the manifest says", named.root);
            }
            Err(_) => println!(
                "its copy by {} was NOT checked: this program does not know how to make it",
                named.spec
            ),
        }
    }
    Ok(())
}

/// The root of a copy that was read from a folder.
pub(super) async fn root(copy: Arc<Image>) -> anyhow::Result<policy::digest::Digest> {
    tokio::task::spawn_blocking(move || Ok(quant::root(&copy, &threads()?))).await?
}

fn threads() -> anyhow::Result<Threads> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    Ok(Threads::new(cores)?)
}
