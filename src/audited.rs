//! Which tables the audit is compared with. Each crate reads its own.

use edge::audit::rows::{self, Audited, Trail};
use edge::audit::{self, Actor};
use sqlx::{PgConnection, PgPool};

/// Assignments, which are compared in another way than the rest.
const RELEASE: &str = "release";

/// The rows of each kind.
async fn read(connection: &mut PgConnection) -> sqlx::Result<Vec<(&'static str, Vec<Audited>)>> {
    Ok(vec![
        ("tenant", edge::auth::key::audited_tenants(connection).await?),
        ("policy", edge::tenant::audited_policies(connection).await?),
        ("consent", edge::tenant::audited_consents(connection).await?),
        ("key", edge::auth::key::audited(connection).await?),
        ("sampler", edge::sampler::audited(connection).await?),
        ("reward", ingest::reward::stored::audited(connection).await?),
        ("run", runs::api::audited::audited(connection).await?),
        ("dataset", runs::dataset::store::audited(connection).await?),
        ("experiment", release::audited::experiments(connection).await?),
    ])
}

/// Notes what is in the tables and not in the audit: it was there before its changes were audited.
/// Once for each kind in the life of the database.
pub async fn begin(pool: &PgPool, actor: Actor<'_>) -> sqlx::Result<()> {
    let mut transaction = edge::database::begin(pool).await?;
    audit::lock(&mut transaction).await?;
    for (kind, rows) in read(&mut transaction).await? {
        rows::begin(&mut transaction, actor, kind, &rows).await?;
    }
    let known = release::audited::known(&mut transaction).await?;
    rows::begin_with(&mut transaction, actor, RELEASE, &known).await?;
    transaction.commit().await
}

/// Whether [`begin`] has noted every kind.
pub async fn has_begun(connection: &mut PgConnection) -> sqlx::Result<bool> {
    let kinds = read(connection).await?;
    for kind in kinds.iter().map(|(kind, _)| *kind).chain([RELEASE]) {
        if !rows::has_begun(connection, kind).await? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Rows that contradict the audit, in words.
pub async fn faults(connection: &mut PgConnection) -> sqlx::Result<Vec<String>> {
    let mut faults = Vec::new();
    for (kind, rows) in read(connection).await? {
        let trail = Trail::read(connection, kind).await?;
        faults.extend(rows::compare(kind, &rows, &trail));
    }
    faults.extend(runs::api::audited::faults_of_state(connection).await?);
    faults.extend(release::audited::faults(connection).await?);
    Ok(faults)
}
