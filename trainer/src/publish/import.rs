//! The first version of a line: a folder of weights from outside.

use super::{Error, Publisher, record};
use policy::image::Image;
use policy::manifest::Manifest;
use policy::store::Pieces;
use std::path::Path;
use std::sync::Arc;
use time::OffsetDateTime;

/// Seeds `line` with the image in `dir` if it has no head yet. Returns the head: the one that was there, or the new one.
/// Two processes that import at once leave one version and one orphan manifest that nobody follows.
pub async fn import(publisher: &Publisher, dir: &Path, line: &str) -> anyhow::Result<i64> {
    use anyhow::Context;
    if let Some(head) = head(publisher, line).await? {
        return Ok(head);
    }
    let path = dir.to_path_buf();
    let image = tokio::task::spawn_blocking(move || Image::read_dir(&path))
        .await?
        .with_context(|| format!("read the base policy in {}", dir.display()))?;
    Ok(import_image(publisher, Arc::new(image), line).await?)
}

/// [`import`] of an image that is in memory.
pub async fn import_image(publisher: &Publisher, image: Arc<Image>, line: &str) -> Result<i64, Error> {
    if let Some(head) = head(publisher, line).await? {
        return Ok(head);
    }
    let (root, parts, tensor_bytes) = {
        let (image, threads) = (Arc::clone(&image), publisher.store.threads().clone());
        tokio::task::spawn_blocking(move || {
            let root = policy::delta::root(&image, &threads);
            (root, image.to_pieces().map(Pieces::new), image.tensor_bytes())
        })
        .await?
    };
    let parts = parts?;
    let mut copies = publisher.copies.make(None, image).await?;
    let quantised = std::mem::take(&mut copies.quantised);
    publisher.copies.keep(root, copies);
    let object = publisher.store.put_pieces(&publisher.policy, &parts).await?;
    let mut manifest = Manifest {
        policy: publisher.policy.clone(),
        version: 0,
        root,
        parent: None,
        line: line.to_string(),
        branch: 0,
        image: Some(object),
        delta: None,
        tensor_bytes,
        run: None,
        fence: 0,
        created_at: OffsetDateTime::now_utc(),
        quantised,
        delta_shards: vec![],
    };
    let place = publisher.place(None).await?;
    publisher.put_manifest(&mut manifest, place, None).await?;
    publisher.store.make_good(&publisher.policy, &[&parts]).await?;
    let mut transaction = publisher.pool.begin().await?;
    record::insert_version(&mut transaction, &manifest).await?;
    let inserted = sqlx::query!(
        "insert into line (policy, line, head) values ($1, $2, $3) on conflict do nothing",
        publisher.policy,
        line,
        manifest.version
    )
    .execute(&mut *transaction)
    .await?;
    if inserted.rows_affected() == 0 {
        transaction.rollback().await?;
        return head(publisher, line)
            .await?
            .ok_or(Error::NoSuchVersion(manifest.version));
    }
    transaction.commit().await?;
    publisher.announce(manifest.version).await;
    Ok(manifest.version)
}

async fn head(publisher: &Publisher, line: &str) -> Result<Option<i64>, Error> {
    let head = sqlx::query_scalar!(
        "select head from line where policy = $1 and line = $2",
        publisher.policy,
        line
    )
    .fetch_optional(&publisher.pool)
    .await?;
    Ok(head)
}
