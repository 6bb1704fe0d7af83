//! Authenticates callers by an API key in `Authorization: Bearer`, looked up in `api_key` by its
//! BLAKE3 digest.
//!
//! A key belongs to a service or a tool and has one role. There are no sessions, users or
//! passwords.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context;
use axum::Router;
use axum::extract::{FromRequestParts, Request, State};
use axum::http::{HeaderMap, header, request::Parts};
use axum::middleware::{self, Next};
use axum::response::Response;
use rand::TryRngCore;
use serde::{Deserialize, Serialize};
use sqlx::PgPool;

use crate::problem::Problem;

/// How long a lookup is cached. A revoked key may work for this much longer.
const CACHE_FOR: Duration = Duration::from_secs(30);
/// Cached keys, valid and invalid ones together.
const CACHE_ENTRIES_MAX: usize = 10_000;
const SECRET_PREFIX: &str = "spring_";

/// What a key may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Request completions, log generations, send feedback.
    Serving,
    /// Schedule and read training runs.
    Research,
    /// Move versions to users.
    Release,
    /// Everything.
    Admin,
}

impl Role {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Serving => "serving",
            Self::Research => "research",
            Self::Release => "release",
            Self::Admin => "admin",
        }
    }

    fn parse(text: &str) -> Option<Self> {
        let roles = [Self::Serving, Self::Research, Self::Release, Self::Admin];
        roles.into_iter().find(|role| role.as_str() == text)
    }
}

/// `[auth]` of the configuration file.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AuthOptions {
    /// Whether every request needs an API key (default: false). If not, every caller is an admin of
    /// the tenant `default`, and servers may listen on loopback addresses only.
    pub required: bool,
}

/// The caller of a request. [`Auth::protect`] adds it to the request's extensions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Principal {
    pub tenant: String,
    pub role: Role,
    /// Who holds the key, for people and audit logs.
    pub label: String,
}

impl Principal {
    fn operator() -> Self {
        Self {
            tenant: "default".to_owned(),
            role: Role::Admin,
            label: "operator".to_owned(),
        }
    }

    /// The holder of the key given to [`Auth::fixed`].
    fn caller() -> Self {
        Self {
            role: Role::Serving,
            label: "caller".to_owned(),
            ..Self::operator()
        }
    }

    /// Fails unless the caller has one of the roles `allowed` or is an admin.
    pub fn require(&self, allowed: &[Role]) -> Result<(), Problem> {
        if self.role == Role::Admin || allowed.contains(&self.role) {
            return Ok(());
        }
        let allowed: Vec<_> = allowed.iter().map(|role| role.as_str()).collect();
        Err(Problem::forbidden(format!(
            "this needs one of the roles {}, but the key has the role {}",
            allowed.join(", "),
            self.role.as_str()
        )))
    }
}

impl<S: Send + Sync> FromRequestParts<S> for Principal {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Problem> {
        let principal = parts.extensions.get::<Self>().cloned();
        principal.ok_or_else(|| Problem::internal("the route is not behind Auth::protect"))
    }
}

/// Checks API keys. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Auth(Keys);

#[derive(Debug, Clone)]
enum Keys {
    /// No key needed: every caller is an admin.
    Open,
    /// The digest of the only valid key, which has the role `serving`. For roles without a
    /// database.
    Fixed([u8; 32]),
    /// The table `api_key`.
    Table { pool: PgPool, cache: Arc<Cache> },
}

#[derive(Debug, Clone)]
struct Lookup {
    at: Instant,
    /// `None`: the key is unknown or revoked.
    principal: Option<Principal>,
}

impl Auth {
    pub fn new(options: AuthOptions, pool: PgPool) -> Self {
        if !options.required {
            return Self(Keys::Open);
        }
        Self(Keys::Table {
            pool,
            cache: Arc::default(),
        })
    }

    /// Accepts only `key`. With `None` no key is needed.
    pub fn fixed(key: Option<&str>) -> Self {
        Self(key.map_or(Keys::Open, |key| Keys::Fixed(digest(key))))
    }

    pub fn required(&self) -> bool {
        !matches!(self.0, Keys::Open)
    }

    /// Requires a valid key on every route of `router`. Handlers take a [`Principal`] and call
    /// [`Principal::require`].
    pub fn protect(&self, router: Router) -> Router {
        router.layer(middleware::from_fn_with_state(self.clone(), check))
    }

    /// The caller that these headers authenticate.
    pub async fn principal(&self, headers: &HeaderMap) -> Result<Principal, Problem> {
        if !self.required() {
            return Ok(Principal::operator());
        }
        let secret =
            secret(headers).ok_or_else(|| Problem::unauthorized("send the key as `Authorization: Bearer <key>`"))?;
        let digest = digest(secret);
        let principal = match &self.0 {
            Keys::Open => Some(Principal::operator()),
            // No constant-time comparison needed: the length of a common digest prefix says nothing
            // about the key.
            Keys::Fixed(only) => (digest == *only).then(Principal::caller),
            Keys::Table { pool, cache } => match cached(cache, &digest) {
                Some(principal) => principal,
                None => {
                    let found = look_up(pool, &digest).await.map_err(|error| {
                        tracing::warn!(error = %format!("{error:#}"), "cannot look up API key");
                        Problem::unavailable("API keys cannot be checked right now", 2)
                    })?;
                    store(cache, digest, found.clone());
                    found
                }
            },
        };
        principal.ok_or_else(|| Problem::unauthorized("the key is unknown or revoked"))
    }
}

type Cache = Mutex<HashMap<[u8; 32], Lookup>>;

/// The outer `None` means not cached. The inner `None` means that the key is unknown or revoked.
fn cached(cache: &Cache, digest: &[u8; 32]) -> Option<Option<Principal>> {
    let cache = cache.lock().unwrap_or_else(PoisonError::into_inner);
    let lookup = cache.get(digest)?;
    (lookup.at.elapsed() < CACHE_FOR).then(|| lookup.principal.clone())
}

fn store(cache: &Cache, digest: [u8; 32], principal: Option<Principal>) {
    let mut cache = cache.lock().unwrap_or_else(PoisonError::into_inner);
    if cache.len() >= CACHE_ENTRIES_MAX {
        cache.retain(|_, lookup| lookup.at.elapsed() < CACHE_FOR);
    }
    if cache.len() < CACHE_ENTRIES_MAX {
        let at = Instant::now();
        cache.insert(digest, Lookup { at, principal });
    }
}

fn digest(key: &str) -> [u8; 32] {
    *blake3::hash(key.as_bytes()).as_bytes()
}

/// Creates a key and returns its secret. Only the secret's digest is stored. Creates the tenant if
/// it is new.
pub async fn create_key(pool: &PgPool, tenant: &str, role: Role, label: &str) -> anyhow::Result<String> {
    let mut random = [0_u8; 32];
    rand::rngs::OsRng
        .try_fill_bytes(&mut random)
        .context("draw random bytes")?;
    let secret = format!("{SECRET_PREFIX}{}", hex::encode(random));
    let digest = digest(&secret);
    let mut transaction = pool.begin().await.context("begin")?;
    sqlx::query!("insert into tenant (id) values ($1) on conflict do nothing", tenant)
        .execute(&mut *transaction)
        .await
        .context("create tenant")?;
    sqlx::query!(
        "insert into api_key (tenant_id, role, digest, label) values ($1, $2, $3, $4)",
        tenant,
        role.as_str(),
        digest.as_slice(),
        label
    )
    .execute(&mut *transaction)
    .await
    .context("store key")?;
    transaction.commit().await.context("commit")?;
    Ok(secret)
}

async fn check(State(auth): State<Auth>, mut request: Request, next: Next) -> Result<Response, Problem> {
    let principal = auth.principal(request.headers()).await?;
    request.extensions_mut().insert(principal);
    Ok(next.run(request).await)
}

async fn look_up(pool: &PgPool, digest: &[u8; 32]) -> anyhow::Result<Option<Principal>> {
    let row = sqlx::query!(
        "select tenant_id, role, label from api_key where digest = $1 and revoked_at is null",
        digest.as_slice()
    )
    .fetch_optional(pool)
    .await
    .context("look up key")?;
    row.map(|row| {
        let role = Role::parse(&row.role).with_context(|| format!("unknown role {:?} in table api_key", row.role))?;
        Ok(Principal {
            tenant: row.tenant_id,
            role,
            label: row.label,
        })
    })
    .transpose()
}

fn secret(headers: &HeaderMap) -> Option<&str> {
    let value = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, key) = value.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| key.trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_key_is_a_bearer_token_and_the_scheme_is_case_insensitive() {
        let read = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::AUTHORIZATION, value.parse().unwrap());
            secret(&headers).map(str::to_owned)
        };
        for value in ["Bearer spring_1", "bearer spring_1", "BEARER  spring_1"] {
            assert_eq!(read(value).as_deref(), Some("spring_1"), "{value}");
        }
        for value in ["Basic c3ByaW5nXzE=", "Digest spring_1", "spring_1"] {
            assert_eq!(read(value), None, "{value}");
        }
    }

    #[test]
    fn a_role_may_do_only_its_own_work_and_an_admin_everything() {
        let research = Principal {
            role: Role::Research,
            ..Principal::operator()
        };
        assert!(research.require(&[Role::Research, Role::Release]).is_ok());
        assert_eq!(
            research.require(&[Role::Release]).unwrap_err().status,
            axum::http::StatusCode::FORBIDDEN
        );
        assert!(Principal::operator().require(&[Role::Release]).is_ok());
    }

    #[tokio::test]
    async fn only_the_fixed_key_is_accepted() {
        let auth = Auth::fixed(Some("spring_right"));
        assert!(auth.required());
        let mut headers = HeaderMap::new();
        for (sent, role) in [
            (None, None),
            (Some("Bearer spring_wrong"), None),
            (Some("Bearer spring_right"), Some(Role::Serving)),
        ] {
            if let Some(sent) = sent {
                headers.insert(header::AUTHORIZATION, sent.parse().unwrap());
            }
            let principal = auth.principal(&headers).await.ok();
            assert_eq!(principal.map(|principal| principal.role), role);
        }
        assert!(!Auth::fixed(None).required());
    }

    #[test]
    fn every_role_round_trips_through_its_name() {
        for role in [Role::Serving, Role::Research, Role::Release, Role::Admin] {
            assert_eq!(Role::parse(role.as_str()), Some(role));
        }
        assert_eq!(Role::parse("root"), None);
    }
}
