//! People and machines that an OpenID Connect provider knows.
//!
//! ```text
//! a machine   sends an access token (RFC 9068) as its bearer token
//! a person    logs in at the page: authorization code with PKCE (RFC 7636); the browser keeps the ID token
//! ```
//! Each request checks the token: signature, issuer, audience, times. Its groups say what the holder may do. The
//! server keeps no session, so what a person loses at the provider is lost here when the token expires.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD as BASE64;
use jsonwebtoken::jwk::Jwk;
use jsonwebtoken::{Algorithm, DecodingKey, Validation, decode, decode_header};
use rand::TryRngCore;
use reqwest::Url;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::key::Grant;
use super::{KeyId, Principal, Scopes};
use crate::problem::Problem;

/// Clocks may differ by so much.
const LEEWAY_SECONDS: u64 = 30;
/// A token may live so long: nobody can take it back.
const LIFE_SECONDS_MAX: u64 = 24 * 3600;
/// The keys of the provider are read again after this time.
const READ_EVERY: Duration = Duration::from_secs(300);
/// While the provider does not answer, its last keys count for so long.
const CUT_OFF_MAX: Duration = Duration::from_secs(3600);
/// Between two tries, also for a token of an unknown key.
const TRY_EVERY: Duration = Duration::from_secs(10);
const TIMEOUT: Duration = Duration::from_secs(5);
/// Of a document of the provider.
const DOCUMENT_BYTES_MAX: usize = 1 << 20;
/// Those of key pairs. With one of the others a holder of the public key could sign.
const ALGORITHMS: [Algorithm; 9] = [
    Algorithm::RS256,
    Algorithm::RS384,
    Algorithm::RS512,
    Algorithm::PS256,
    Algorithm::PS384,
    Algorithm::PS512,
    Algorithm::ES256,
    Algorithm::ES384,
    Algorithm::EdDSA,
];

crate::options! {
    /// `[auth.oidc]` of the configuration file.
    #[derive(Eq)]
    pub struct OidcOptions {
        /// The provider's issuer, exactly as its `/.well-known/openid-configuration` spells it.
        pub issuer: String,
        /// Access tokens must be for this audience. Another one than the client's, which ID tokens have.
        pub audience: String = "springtide".to_owned(),
        /// The client as which people log in at the page.
        pub client_id: String = "springtide-page".to_owned(),
        /// Its secret, if it is a confidential client.
        #[serde(skip_serializing)]
        pub client_secret: Option<String> = None,
        /// The page's `/login/callback` as browsers reach it. Default: nobody logs in at the page this way.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub redirect_url: Option<String> = None,
        /// The claim that lists the holder's groups.
        pub groups_claim: String = "groups".to_owned(),
        /// What groups may do: `[{ name = "sre", role = "release", tenant = "default" }]`, or `scopes = ["read"]` instead
        /// of a role. Who is in none is refused. Who is in several has the tenant of the first of them here, and may do
        /// what all of that tenant may.
        pub groups: Vec<Group>,
    }
}

/// What the members of a group may do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Group {
    /// As the provider spells it.
    pub name: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub role: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scopes: Option<Vec<String>>,
    #[serde(default = "default_tenant")]
    pub tenant: String,
}

impl Group {
    fn may(&self) -> anyhow::Result<Scopes> {
        let scopes = match (&self.role, &self.scopes) {
            (Some(role), None) => Grant::parse(role, None)?.scopes(),
            (None, Some(scopes)) => Scopes::parse(scopes)?,
            _ => anyhow::bail!("it needs either a role or scopes"),
        };
        ensure!(!scopes.is_empty(), "it may do nothing");
        Ok(scopes)
    }
}

fn default_tenant() -> String {
    super::OPEN_TENANT.to_owned()
}

impl OidcOptions {
    /// Refuses what cannot work.
    pub fn check(&self) -> Result<(), String> {
        https(&self.issuer).map_err(|why| format!("auth.oidc.issuer {why}"))?;
        if let Some(url) = &self.redirect_url {
            https(url).map_err(|why| format!("auth.oidc.redirect_url {why}"))?;
            if !url.ends_with("/login/callback") {
                return Err("auth.oidc.redirect_url must end in /login/callback".into());
            }
        }
        if self.audience.is_empty() || self.client_id.is_empty() || self.audience == self.client_id {
            return Err(
                "auth.oidc.audience and client_id must be set and differ: else an ID token would pass for an access token"
                    .into(),
            );
        }
        for group in &self.groups {
            let may = group.may();
            may.map_err(|why| format!("auth.oidc.groups: {:?}: {why:#}", group.name))?;
        }
        match self.groups.is_empty() {
            true => Err("auth.oidc.groups is empty, so nobody could do anything: name a group and its role".into()),
            false => Ok(()),
        }
    }
}

/// Only this machine is asked without TLS.
fn https(url: &str) -> Result<Url, String> {
    let url = Url::parse(url).map_err(|error| format!("is no address: {error}"))?;
    let host = url.host_str().unwrap_or_default();
    match url.scheme() {
        "https" => Ok(url),
        "http" if matches!(host, "localhost" | "127.0.0.1" | "[::1]") => Ok(url),
        _ => Err(format!("is {url}: give an address that begins with https://")),
    }
}

/// What a token is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// An access token, in a header.
    Access,
    /// An ID token, in the page's cookie.
    Page,
}

/// Whether two names of holders are those of one person. People may change what stands before the subject.
pub fn is_same_person(one: &str, other: &str) -> bool {
    let subject = |label: &str| Some(label.rsplit_once(" (")?.1.to_owned());
    one == other || (subject(one).is_some() && subject(one) == subject(other))
}

/// Whether a credential has the form of a token: three parts. API keys have no dot.
pub fn is_token(credential: &str) -> bool {
    credential.split('.').count() == 3
}

/// What a login at the provider must bring back. The browser keeps it meanwhile.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attempt {
    pub state: String,
    nonce: String,
    verifier: String,
    /// Where the person wanted to go.
    pub next: String,
}

impl Attempt {
    pub fn new(next: &str) -> Result<Self, Problem> {
        let random = || {
            let mut bytes = [0; 32];
            let drawn = rand::rngs::OsRng.try_fill_bytes(&mut bytes);
            drawn.map(|()| BASE64.encode(bytes)).map_err(Problem::internal)
        };
        Ok(Self {
            state: random()?,
            nonce: random()?,
            verifier: random()?,
            next: next.to_owned(),
        })
    }

    /// For a cookie.
    pub fn to_text(&self) -> String {
        BASE64.encode(serde_json::to_vec(self).unwrap_or_default())
    }

    pub fn from_text(text: &str) -> Option<Self> {
        serde_json::from_slice(&BASE64.decode(text).ok()?).ok()
    }
}

/// The provider: its addresses and keys, read when they are needed.
#[derive(Debug)]
pub struct Provider {
    options: OidcOptions,
    /// [`TRY_EVERY`], but in tests.
    try_every: Duration,
    known: Mutex<Known>,
    /// Held by the request that reads.
    reading: tokio::sync::Mutex<()>,
}

#[derive(Debug, Clone, Default)]
struct Known {
    documents: Option<(Instant, Arc<Documents>)>,
    tried_at: Option<Instant>,
}

#[derive(Debug)]
struct Documents {
    discovery: Discovery,
    keys: Vec<Jwk>,
}

#[derive(Debug, Deserialize)]
struct Discovery {
    issuer: String,
    authorization_endpoint: String,
    token_endpoint: String,
    jwks_uri: String,
}

impl Documents {
    /// The key of a token; without an id, the only one.
    fn key(&self, id: Option<&str>) -> Option<&Jwk> {
        match id {
            None => (self.keys.len() == 1).then(|| &self.keys[0]),
            id => self.keys.iter().find(|key| key.common.key_id.as_deref() == id),
        }
    }
}

fn client() -> anyhow::Result<reqwest::Client> {
    let client = crate::tls::client_of_others()
        .timeout(TIMEOUT)
        .redirect(reqwest::redirect::Policy::none());
    client.build().context("make the client of the identity provider")
}

async fn fetch(request: reqwest::RequestBuilder) -> anyhow::Result<Vec<u8>> {
    let mut response = request.send().await?;
    let status = response.status();
    let mut body = vec![];
    while let Some(bytes) = response.chunk().await? {
        ensure!(body.len() + bytes.len() <= DOCUMENT_BYTES_MAX, "its answer is too long");
        body.extend_from_slice(&bytes);
    }
    // what it says is wrong, without the tokens of an answer
    let said: Value = serde_json::from_slice(&body).unwrap_or_default();
    ensure!(status.is_success(), "it answers {status}, {}", said["error"]);
    Ok(body)
}

/// People do not log in through a provider.
pub fn no_login() -> Problem {
    Problem::not_found("nobody logs in through a provider here: auth.oidc.redirect_url is not set")
}

fn refused(why: impl std::fmt::Display) -> Problem {
    Problem::unauthorized(format!("the identity provider's token is not accepted: {why}"))
}

impl Provider {
    pub fn new(options: OidcOptions) -> Self {
        Self {
            options,
            try_every: TRY_EVERY,
            known: Mutex::default(),
            reading: tokio::sync::Mutex::default(),
        }
    }

    /// Whether people log in at the page through it.
    pub fn has_login(&self) -> bool {
        self.options.redirect_url.is_some()
    }

    /// The provider's host, for people.
    pub fn host(&self) -> String {
        let host = Url::parse(&self.options.issuer).ok();
        host.and_then(|url| url.host_str().map(str::to_owned))
            .unwrap_or_default()
    }

    /// Whether browsers reach the page over TLS.
    pub fn is_secure(&self) -> bool {
        let url = self.options.redirect_url.as_ref();
        url.is_some_and(|url| url.starts_with("https://"))
    }

    /// The holder of a token.
    pub async fn verify(&self, token: &str, used: Use) -> Result<Principal, Problem> {
        let claims = self.claims(token, used).await?;
        self.holder(&claims, used)
    }

    async fn claims(&self, token: &str, used: Use) -> Result<Map<String, Value>, Problem> {
        let header = decode_header(token).map_err(refused)?;
        if !ALGORITHMS.contains(&header.alg) {
            return Err(refused(format!("it is signed with {:?}", header.alg)));
        }
        let is_access = header
            .typ
            .as_deref()
            .is_some_and(|typ| typ.eq_ignore_ascii_case("at+jwt") || typ.eq_ignore_ascii_case("application/at+jwt"));
        if is_access != (used == Use::Access) {
            return Err(refused(match used {
                Use::Access => "it is no access token of RFC 9068, whose `typ` is `at+jwt`",
                Use::Page => "it is no ID token",
            }));
        }
        let id = header.kid.as_deref();
        let documents = self.documents(|documents| documents.key(id).is_some()).await?;
        let key = documents.key(id);
        let key = key.ok_or_else(|| refused("it is signed with a key that the provider does not have"))?;
        let key = DecodingKey::from_jwk(key).map_err(refused)?;
        let mut validation = Validation::new(header.alg);
        validation.leeway = LEEWAY_SECONDS;
        validation.validate_nbf = true;
        validation.set_required_spec_claims(&["exp", "iss", "aud", "sub", "iat"]);
        validation.set_issuer(&[&self.options.issuer]);
        validation.set_audience(&[match used {
            Use::Access => &self.options.audience,
            Use::Page => &self.options.client_id,
        }]);
        let claims = decode::<Map<String, Value>>(token, &key, &validation)
            .map_err(refused)?
            .claims;
        let time = |name: &str| claims.get(name).and_then(Value::as_f64).unwrap_or(f64::INFINITY);
        let (from, to) = (time("iat"), time("exp"));
        let now = time::OffsetDateTime::now_utc().unix_timestamp() as f64;
        if from > now + LEEWAY_SECONDS as f64 {
            return Err(refused("it was issued in the future, or at no time"));
        }
        if to - from > LIFE_SECONDS_MAX as f64 {
            return Err(refused("it lives longer than 24 hours, and nobody could take it back"));
        }
        // OpenID Connect Core 3.1.3.7: of several audiences, the client must be the one that it was issued to
        let others = claims.get("azp").and_then(Value::as_str);
        if used == Use::Page && others.is_some_and(|client| client != self.options.client_id) {
            return Err(refused("it was issued to another client"));
        }
        Ok(claims)
    }

    fn holder(&self, claims: &Map<String, Value>, used: Use) -> Result<Principal, Problem> {
        let text = |name: &str| claims.get(name).and_then(Value::as_str);
        let subject = text("sub").filter(|subject| !subject.is_empty());
        let subject = subject.ok_or_else(|| refused("it has no `sub`"))?;
        let listed: Vec<&str> = match claims.get(&self.options.groups_claim) {
            Some(Value::String(group)) => vec![group],
            Some(Value::Array(groups)) => groups.iter().filter_map(Value::as_str).collect(),
            _ => vec![],
        };
        let groups = || {
            let groups = self.options.groups.iter();
            groups.filter(|group| listed.contains(&group.name.as_str()))
        };
        // the name is for people; the subject is what nobody can choose
        let name = match used {
            Use::Access => text("client_id").or_else(|| text("azp")),
            Use::Page => text("email")
                .or_else(|| text("preferred_username"))
                .or_else(|| text("name")),
        };
        let name: String = name
            .unwrap_or_default()
            .chars()
            .filter(|c| !c.is_control())
            .take(100)
            .collect();
        let subject_shown: String = subject.chars().filter(|c| !c.is_control()).take(100).collect();
        let label = match used {
            Use::Access if name.is_empty() || name == subject_shown => subject_shown,
            Use::Page if name.is_empty() => format!("someone ({subject_shown})"),
            _ => format!("{name} ({subject_shown})"),
        };
        let Some(first) = groups().next() else {
            return Err(Problem::forbidden(format!(
                "{label} is in no group that may do something here: auth.oidc.groups names those that may, and the claim \
                 `{}` of the token says whose members its holder is",
                self.options.groups_claim
            )));
        };
        let of_tenant = groups().filter(|group| group.tenant == first.tenant);
        // the configuration was checked at the start
        let scopes = of_tenant.fold(Scopes::default(), |scopes, group| {
            scopes.and(group.may().unwrap_or_default())
        });
        let identity = blake3::hash(format!("{}\0{subject}", self.options.issuer).as_bytes());
        let mut id = [0; 16];
        id.copy_from_slice(&identity.as_bytes()[..16]);
        let id = uuid::Builder::from_custom_bytes(id).into_uuid();
        Ok(Principal {
            tenant: first.tenant.clone(),
            scopes,
            label,
            key: Some(KeyId { id, lineage: id }),
            replica: None,
            requests_per_second: None,
            is_person: used == Use::Page,
        })
    }

    /// The provider's addresses and keys. They are read again if they are not `enough`.
    async fn documents(&self, enough: impl Fn(&Documents) -> bool) -> Result<Arc<Documents>, Problem> {
        let known = || self.known.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let has = |known: &Known, age: Duration| {
            let (read_at, documents) = known.documents.as_ref()?;
            (read_at.elapsed() < age && enough(documents)).then(|| Arc::clone(documents))
        };
        if let Some(documents) = has(&known(), READ_EVERY) {
            return Ok(documents);
        }
        let old = has(&known(), CUT_OFF_MAX);
        let turn = match (&old, self.reading.try_lock()) {
            (_, Ok(turn)) => turn,
            (Some(old), Err(_)) => return Ok(Arc::clone(old)),
            (None, Err(_)) => self.reading.lock().await,
        };
        let now = known();
        let is_recent = now.tried_at.is_some_and(|at| at.elapsed() < self.try_every);
        if !is_recent {
            let read = self.read().await;
            let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
            known.tried_at = Some(Instant::now());
            match read {
                Ok(documents) => known.documents = Some((Instant::now(), Arc::new(documents))),
                Err(error) => tracing::warn!(
                    error = format!("{error:#}"),
                    "cannot read the keys of the identity provider"
                ),
            }
        }
        drop(turn);
        let now = known();
        match has(&now, READ_EVERY).or(old) {
            Some(documents) => Ok(documents),
            None => match now.documents.filter(|(read_at, _)| read_at.elapsed() < READ_EVERY) {
                Some((_, documents)) => Ok(documents), // the provider has no such key
                None => Err(Problem::unavailable("the identity provider does not answer", 10)),
            },
        }
    }

    async fn read(&self) -> anyhow::Result<Documents> {
        let issuer = &self.options.issuer;
        let at = format!("{}/.well-known/openid-configuration", issuer.trim_end_matches('/'));
        let http = client()?;
        let discovery: Discovery = serde_json::from_slice(&fetch(http.get(&at)).await?).context(at)?;
        ensure!(
            discovery.issuer == *issuer,
            "its issuer is {}, and auth.oidc.issuer is {issuer}",
            discovery.issuer
        );
        for endpoint in [
            &discovery.authorization_endpoint,
            &discovery.token_endpoint,
            &discovery.jwks_uri,
        ] {
            https(endpoint).map_err(|why| anyhow::anyhow!("an endpoint {why}"))?;
        }
        #[derive(Deserialize)]
        struct Set {
            keys: Vec<Value>,
        }
        let set = fetch(http.get(&discovery.jwks_uri)).await?;
        let set: Set = serde_json::from_slice(&set).context("read the set of keys")?;
        let signs = |key: &Value| key["use"].as_str().is_none_or(|used| used == "sig");
        let keys = set.keys.into_iter().filter(signs);
        Ok(Documents {
            discovery,
            // those of a kind that is not known here are no reason to refuse the others
            keys: keys.filter_map(|key| serde_json::from_value(key).ok()).collect(),
        })
    }

    /// Where a person logs in.
    pub async fn login_address(&self, attempt: &Attempt) -> Result<Url, Problem> {
        let documents = self.documents(|_| true).await?;
        let challenge = BASE64.encode(openssl::sha::sha256(attempt.verifier.as_bytes()));
        let redirect = self.redirect_url()?;
        let parameters = [
            ("response_type", "code"),
            ("client_id", &self.options.client_id),
            ("redirect_uri", redirect),
            ("scope", "openid email profile"),
            ("state", &attempt.state),
            ("nonce", &attempt.nonce),
            ("code_challenge", &challenge),
            ("code_challenge_method", "S256"),
        ];
        let mut url = Url::parse(&documents.discovery.authorization_endpoint).map_err(Problem::internal)?;
        url.query_pairs_mut().extend_pairs(parameters);
        Ok(url)
    }

    fn redirect_url(&self) -> Result<&str, Problem> {
        let url = self.options.redirect_url.as_deref();
        url.ok_or_else(no_login)
    }

    /// The ID token for a code that the provider gave the browser.
    pub async fn redeem(&self, code: &str, attempt: &Attempt) -> Result<(String, Principal), Problem> {
        let documents = self.documents(|_| true).await?;
        let redirect = self.redirect_url()?;
        let OidcOptions {
            client_id,
            client_secret,
            ..
        } = &self.options;
        let mut form = vec![
            ("grant_type", "authorization_code"),
            ("code", code),
            ("redirect_uri", redirect),
            ("client_id", client_id),
            ("code_verifier", &attempt.verifier),
        ];
        if let Some(secret) = client_secret {
            form.push(("client_secret", secret));
        }
        let form = Url::parse_with_params("form:", form).map_err(Problem::internal)?;
        let request = (client()
            .map_err(Problem::internal)?
            .post(&documents.discovery.token_endpoint))
        .header("content-type", "application/x-www-form-urlencoded")
        .body(form.query().unwrap_or_default().to_owned());
        let answer = fetch(request).await;
        let answer = answer.map_err(|error| refused(format!("its code was not redeemed: {error:#}")))?;
        #[derive(Deserialize)]
        struct Tokens {
            id_token: String,
        }
        let Tokens { id_token } = serde_json::from_slice(&answer).map_err(|_| refused("it gave no ID token"))?;
        let claims = self.claims(&id_token, Use::Page).await?;
        if claims.get("nonce").and_then(Value::as_str) != Some(&attempt.nonce) {
            return Err(refused("it is of another login"));
        }
        let holder = self.holder(&claims, Use::Page)?;
        Ok((id_token, holder))
    }
}

#[cfg(test)]
mod tests;
