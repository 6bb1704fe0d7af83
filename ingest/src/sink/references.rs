//! What stored generations keep in the object store. Whether it is there is asked at the entrance and by whoever reads it: a
//! log is read also while the store is away.

use sqlx::PgConnection;

use super::rows::Row;
use crate::event::Generation;

pub(super) async fn insert(connection: &mut PgConnection, rows: &[Row<'_, Generation>]) -> sqlx::Result<()> {
    let (mut ids, mut kinds, mut tenants) = (Vec::new(), Vec::new(), Vec::new());
    let (mut digests, mut sizes, mut types) = (Vec::new(), Vec::new(), Vec::new());
    for row in rows {
        for (kind, payload) in [("prompt", &row.body.payload), ("experts", &row.body.experts)] {
            let Some(payload) = payload else { continue };
            ids.push(row.body.id);
            kinds.push(kind.to_owned());
            tenants.push(row.event.tenant.clone());
            digests.push(payload.digest.to_vec());
            sizes.push(i64::try_from(payload.size_bytes).unwrap_or(i64::MAX));
            types.push(payload.media_type.clone());
        }
    }
    if ids.is_empty() {
        return Ok(());
    }
    sqlx::query!(
        "insert into payload_reference (generation_id, kind, tenant_id, digest, size_bytes, media_type) \
         select * from unnest($1::uuid[], $2::text[], $3::text[], $4::bytea[], $5::bigint[], $6::text[])",
        &ids,
        &kinds,
        &tenants,
        &digests,
        &sizes,
        &types
    )
    .execute(connection)
    .await?;
    Ok(())
}
